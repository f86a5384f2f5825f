from benchmarks.models.cli import main

main(prog_name="python -m benchmarks.models")
