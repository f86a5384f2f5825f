"""The worker process `gem-worker`, which runs one worker or many."""
