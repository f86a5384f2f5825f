"""The worker process `gem-worker`: one worker, or several in threads."""
