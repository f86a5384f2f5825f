"""Coverage-guided fuzzing of one target with atheris: `python -m fuzz.run TARGET SECONDS|--keep` in tests/, or `make fuzz`.

What reaches new code is kept outside the repository, where the next run goes on from it; what is a bug is written to a file
there, and named. `--keep` puts the smallest of it into corpus/TARGET, which the tests replay.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import atheris

# numba can't read what is instrumented.
COMPILED = ["gem_server.rules.fused", "gem_server.rules.bins", "gem_server.core.norm_bound", "gem_api.conversions"]
with atheris.instrument_imports(include=["gem_api", "gem_server", "json"], exclude=COMPILED):
    from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path(tempfile.gettempdir()) / "gem-fuzz"
LONGEST = 20_000
MAX_CORPUS = 20_000  # bytes of each target


def main(name: str, seconds: int) -> None:
    """Fuzzes for some seconds, then prints the number of inputs tried. Exits with a status other than 0 if one reveals a
    bug."""
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
    atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()


def keep(name: str) -> None:
    """Adds the smallest inputs found to the corpus that the tests replay."""
    paths = sorted((FOUND / name).iterdir(), key=lambda path: path.stat().st_size)
    sizes = accumulate(path.stat().st_size for path in paths)
    for path, size in zip(paths, sizes, strict=True):
        if size <= MAX_CORPUS:
            shutil.copy(path, CORPUS / name / path.name)


if __name__ == "__main__":
    if sys.argv[2:] == ["--keep"]:
        keep(sys.argv[1])
    else:
        main(sys.argv[1], int(sys.argv[2]))
