from benchmarks.peers.cli import main

main(prog_name="python -m benchmarks.peers")
