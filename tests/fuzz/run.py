"""Coverage-guided fuzzing of one target with atheris: `python -m fuzz.run TARGET SECONDS` in tests/, or `make fuzz`.

What it finds new is kept in a corpus outside the repository; a crash is written to a file there, and named. `--keep` puts the
smallest inputs that reach all of it into corpus/TARGET, which the tests replay.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import atheris

# numba can't read what is instrumented.
COMPILED = ["gem_server.rules.fused", "gem_server.rules.bins", "gem_server.norms", "gem_api.conversions"]
with atheris.instrument_imports(include=["gem_api", "gem_server", "json"], exclude=COMPILED):
    from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path(tempfile.gettempdir()) / "gem-fuzz"
LONGEST = 20_000
LARGEST_CORPUS = 30_000  # bytes of each target


def main(name: str, seconds: int, keep: bool) -> None:
    """Fuzzes for so long, then says how many inputs were tried; exits with a status other than 0 where one is a bug."""
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (found / f"seed-{number}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST}",
        f"-artifact_prefix={found.parent}/{name}-",
        "-timeout=30",
        "-len_control=0",
    ]
    options += [f"-dict={Path(__file__).parent / 'words.dict'}", "-print_final_stats=1", "-rss_limit_mb=4096"]
    if keep:
        chosen = FOUND / f"{name}-chosen"
        shutil.rmtree(chosen, ignore_errors=True)
        chosen.mkdir()
        options = ["-merge=1", str(chosen), *options[1:]]
        sources = [found, CORPUS / name]
    else:
        sources = [found, CORPUS / name]
    atheris.Setup([sys.argv[0], *options, *(str(each) for each in sources if each.is_dir())], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 60, "--keep" in sys.argv)
