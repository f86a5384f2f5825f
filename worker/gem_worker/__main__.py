from gem_worker.cli import main

main(prog_name="gem-worker")
