from gem_worker.process.cli import main

main(prog_name="gem-worker")
