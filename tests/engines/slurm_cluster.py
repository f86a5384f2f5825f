"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each node. Needs root and Debian's `slurm-wlm`."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kit.server import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
PATIENCE = 300.0  # seconds that anything may take on a busy machine
# Requeued tasks may start again after `cred_expire` seconds; Slurm's own default is two minutes.
CONFIG = """
ClusterName=gemtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=30
MinJobAge=3600
ReturnToService=2
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port}-{last_port} CPUs=1 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


def missing() -> str:
    """Why Slurm can't run here; empty if it can."""
    if os.geteuid() != 0:
        return "slurmctld and slurmd need root"
    gone = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(gone)} (Debian: apt-get install slurm-wlm munge)" if gone else ""


class Slurm:
    """Starts a cluster; use it as a context manager.

    Args:
        folder: An empty folder for its configuration, state and logs.
        nodes: How many nodes of one processor it has: n0, n1 …

    Attributes:
        environment: What Slurm's commands and a user's `sbatch` need.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._nodes = folder, nodes
        self._daemons: list[subprocess.Popen[bytes]] = []
        ports = _free_ports(nodes + 1)
        self._config = folder / "slurm.conf"
        self._config.write_text(
            CONFIG.format(
                host=socket.gethostname().partition(".")[0], folder=folder,
                port=ports[0], first_port=ports[1], last_port=ports[-1], last=nodes - 1,
            )
        )  # fmt: skip
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("GEM_", "SLURM_", "COV_", "SBATCH_"))
        }
        path = f"{Path(sys.executable).parent}:{clean['PATH']}"  # as `source .venv/bin/activate` sets it
        self.environment = clean | {"SLURM_CONF": str(self._config), "PATH": path}

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        folder = self._folder
        folder.chmod(0o755)  # munged refuses a socket that others can't reach
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        names = ["key", "socket", "pid", "log", "seed"]
        files = [f"--{name}-file={folder}/munge.{name}" for name in names if name != "socket"]
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_until((folder / "munge.socket").exists, "munged's socket", PATIENCE)
        self._daemon("slurmctld", "-D", "-c", "-f", str(self._config))
        for node in range(self._nodes):
            (folder / f"n{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", f"n{node}", "-f", str(self._config))
        wait_until(lambda: self._idle() == self._nodes, f"{self._nodes} idle nodes", PATIENCE)

    def _daemon(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.out").open("ab") as out:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment)
        self._daemons.append(daemon)

    def _idle(self) -> int:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args!r} ended: {self.logs()}"
        nodes = self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", check=False).split()
        return len(set(nodes))

    def stop(self) -> None:
        """Cancels every job and ends the daemons, and with them whatever a job has left behind."""
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root", "--quiet", check=False)
            wait_until(lambda: not self.run("squeue", "--noheader", check=False), "no job in the queue", PATIENCE)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(PATIENCE)
        self._daemons.clear()

    def run(self, *command: str, check: bool = True, variables: dict[str, str] | None = None) -> str:
        """Runs a command as a user of the cluster would; returns what it printed on standard output."""
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self.environment | (variables or {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert not (check and done.returncode), f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *command: str, **variables: str) -> int:
        """`sbatch`; returns the job's number, of a job array that of the array."""
        return int(self.run("sbatch", "--parsable", *command, variables=variables))

    def task(self, job: int, number: int) -> dict[str, str]:
        """What `scontrol show job` says of one task of a job array."""
        shown = self.run("scontrol", "--oneliner", "show", "job", f"{job}_{number}")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def output(self, job: int) -> str:
        """What the tasks of a job array have printed, each line behind the number of its task."""
        found = sorted(self._folder.glob(f"gem-{job}_*.log"))
        return "\n".join(f"{log.stem}: {line}" for log in found for line in log.read_text(encoding="utf-8").splitlines())

    def logs(self) -> str:
        """The last lines of the daemons."""
        files = [*self._folder.glob("*.out"), *self._folder.glob("*.log")]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)


def left_behind(folder: Path) -> list[str]:
    """The processes that a cluster in this folder has started and that still run: all have its name in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if f"SLURM_CONF={folder}/".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def _free_ports(count: int) -> list[int]:
    """Free ports that follow one another, below those that the system gives to outgoing connections."""
    for first in range(20_000, 32_000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for port, probe in enumerate(probes, first):
                probe.bind(("127.0.0.1", port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise OSError(f"no {count} free ports in a row")
