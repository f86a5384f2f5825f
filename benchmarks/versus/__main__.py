from benchmarks.versus.cli import main

main(prog_name="python -m benchmarks.versus")
