"""What the benchmarks share: results, tables, runs, processes, facts about the machine."""
