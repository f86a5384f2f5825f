"""The settings of all commands, each in one row.

All else derives from the rows: options and --help, the keys of the file of --config, the fields of `ServerConfig`, what
gem-train hands to its servers and workers, what a resumed run keeps, docs/settings.md, and the schema of the Helm chart. The
rows of hyper-parameters are made from their declarations in `gem_api.hyperparameters`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import click

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS
from gem_api.process.host_limits import MAX_APPLY_THREADS, default_limit
from gem_api.process.option_types import (
    ADDRESSES,
    FILE,
    FOLDER,
    LANE_LISTEN,
    MEMORY_SOCKET,
    PART,
    SERVER_ADDRESS,
    Bytes,
    Number,
    RunToResume,
    Times,
    Whole,
    of_hyperparameter,
    private_socket,
)
from gem_api.ranges import MAX_RANGES, WHOLE, Range
from gem_api.wire_names import WIRE_NAMES

Command = Literal["server", "train", "worker", "evaluator", "ctl"]  # gem-server, gem-train, ...
DURABILITIES = ("memory", "snapshot", "log")  # what survives a crash of the server
BUILT_IN_TASKS = ("digits", "mnist")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Under these --help lists the options, in this order. Those that name none are under the last.
HEADINGS = (
    "Most used", "Run", "Cluster", "Network", "Durability", "Rule", "Steps of the workers", "Security", "Advanced", "Options",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A setting of one command, or of several that mean the same.

    Attributes:
        key: Its name in the file of --config. GEM_ and the key in upper case is its environment variable.
        commands: The commands that take it.
        type: What its text may be, and what it is read as.
        default: The value if the user gives none, or a function that returns it.
        heading: The heading that --help lists its option under, one of HEADINGS. Empty: it has no option, and only the file and
            the environment set it.
        help: What users read about it, with the unit.
        spelling: Its option, if that is not -- and the key, such as "--overlap/--no-overlap".
        shown_default: What users read as the default; empty: the default itself.
        metavar: What stands for the value in --help; empty: the name of its type.
        name: The parameter of the command; empty: the key.
        variables: Its environment variables, of which the first that is set counts; empty: GEM_ and the key.
        fixed: Whether a resumed run of gem-train keeps it.
        handed_over: Whether gem-train hands it to the servers or workers that it starts: the value of its own setting, or what
            its --config says if it has none.
        by_deployment: Whether it depends on where the process runs. Then the Helm chart and the compose file set it.
    """

    key: str
    commands: tuple[Command, ...]
    type: click.ParamType[Any]
    default: Any
    heading: str = ""
    _: KW_ONLY
    help: str
    spelling: str = ""
    shown_default: str = ""
    metavar: str = ""
    name: str = ""
    variables: tuple[str, ...] = ()
    fixed: bool = False
    handed_over: bool = False
    by_deployment: bool = False

    @property
    def option(self) -> str:
        """Its option; empty if it has none."""
        return self.heading and (self.spelling or f"--{self.key.replace('_', '-')}")


def server_field(
    kind: click.ParamType[Any], default: Any, heading: str = "", commands: tuple[Command, ...] = ("server",), **columns: Any
) -> Any:
    """A field of `ServerSettings`, and its row."""
    row = {"setting": Setting("", commands, kind, default, heading, **columns)}
    return field(default_factory=default, metadata=row) if callable(default) else field(default=default, metadata=row)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server as a configuration that other code reads. Each field is a row of ALL_SETTINGS too."""

    # fmt: off
    listen: str = server_field(click.STRING, "127.0.0.1:50051", "Most used", by_deployment=True,
        help="Address to serve gRPC on; 0.0.0.0:50051 accepts other machines.")
    checkpoint_dir: Path | None = server_field(FOLDER, None, "Most used", by_deployment=True,
        help="Folder for checkpoints; without it nothing is saved.")
    resume: bool = server_field(click.BOOL, False, "Most used", spelling="--resume/--no-resume", by_deployment=True,
        help="Continue from the newest checkpoint in --checkpoint-dir, if there is one.")
    min_workers: int = server_field(Whole(1), 1, "Cluster", handed_over=True,
        help="Begin training only once this number of workers has joined.")
    start_quiet_seconds: float = server_field(Number(0), 0.0, handed_over=True,
        help="A new run begins training once no further worker has joined for this number of seconds, 10 minutes after the "
        "first one at the latest. min_workers counts beside it. A resumed run does not wait.")
    range: Range = server_field(PART, WHOLE, "Network", by_deployment=True,
        help="Which part of the model this server holds, if N servers hold it together: 0/N, which leads, to N-1/N. Give all "
        "of them the same other options, among them --durability log.")
    peers: tuple[str, ...] = server_field(ADDRESSES, (), "Network", by_deployment=True,
        help="On the server of range 0: the addresses of ranges 1, 2, ..., as workers reach them.")
    # None: auto. Empty: off.
    lane_listen: str | None = server_field(LANE_LISTEN, None, shown_default="auto", by_deployment=True,
        help="Address of the lane, a second port that carries workers' commits faster than gRPC does. auto: the port after "
        "that of --listen, or a free one; off: commits of other machines go over gRPC.")
    metrics_listen: str = server_field(click.STRING, "127.0.0.1:9464", "Network", by_deployment=True,
        help="Address of the live page (/), the Prometheus metrics (/metrics) and the probes (/healthz, /readyz); empty: none.")
    # Begins with @ if the socket has no file. Empty: off.
    memory_socket: str = server_field(MEMORY_SOCKET, private_socket, shown_default="auto", handed_over=True, by_deployment=True,
        help="Unix socket for workers on this machine, who share memory with the server. auto: a socket without a file; a "
        "path: in a folder that containers share; off: no shared memory.")
    durability: str = server_field(click.Choice(DURABILITIES), "snapshot", "Durability",
        shown_default="snapshot with --checkpoint-dir, else memory", handed_over=True,
        help="What survives a crash. memory: only checkpoints made on request; snapshot: all up to the last checkpoint; log: "
        "every acknowledged commit.")
    checkpoint_interval: float = server_field(Number(0), 30.0, handed_over=True,
        help="Seconds between checkpoints; 0: only on request and at the end.")
    checkpoint_keep: int = server_field(Whole(1), 3, handed_over=True, help="Checkpoints to keep; older ones are removed.")
    log_limit: int = server_field(Bytes(), 1 << 30, shown_default="1G", handed_over=True,
        help="With --durability log: write a checkpoint when the log since the last one exceeds this size.")
    # /dev/null: none.
    history: Path | None = server_field(FILE, None, "Durability", shown_default="commits.csv in --checkpoint-dir",
        help="CSV file that gets a line of some 100 bytes for every commit; evaluations go beside it; /dev/null: none. A new "
        "run renames an existing file to FILE.old.")
    tokens: Path | None = server_field(FILE, None, "Security", by_deployment=True,
        help="File of bearer tokens; clients without one are rejected. Each line is TOKEN ROLE [WORKER], with the role worker, "
        "evaluator or admin.")
    max_norm_ratio: float = server_field(Number(0), 0.0, handed_over=True,
        help="Reject a commit if its gradient's norm exceeds this multiple of the median of the last 100; 0: no bound. Honest "
        "runs have reached 50.")
    quarantine_after: int | None = server_field(Whole(0), None, shown_default="3 with max_norm_ratio, else 0", handed_over=True,
        help="Quarantine a worker, until gem-ctl lifts it, after this number of rejected gradients in a row (too large, NaN or "
        "infinite); 0: never.")
    memory_limit: int = server_field(Bytes(), default_limit, shown_default="4/5 of the machine's or container's",
        handed_over=True,
        help="Memory that the model and the workers may take, such as 8G; 0: no limit.")
    apply_threads: int = server_field(Whole(0), 0, handed_over=True,
        help=f"Threads that apply a commit of a large model; 0: one for each core, at most {MAX_APPLY_THREADS}.")
    lease_seconds: float = server_field(Number(1, 3600), 15.0, commands=("server", "train"), handed_over=True,
        help="Seconds that a worker may be silent before its lease ends.")
    # fmt: on


# The hyper-parameters among the options that are used most, in the order of --help.
_MOST_USED = ("epochs", "steps", "batch_size", "learning_rate", "optimizer")
_SHARD_SIZE = "256, or the next multiple of --batch-size; with batch_variation at least 4 commits"
_SHOWN = {
    "shard_size": _SHARD_SIZE, "optimizer": "the first worker's, else sgd", "schedule": "the first worker's, else constant",
}  # fmt: skip
# Those whose default gem-train works out once it knows the others, and what users read about it.
_WORKED_OUT = {"epochs": "40 for digits, else 1; 0 with --steps", "shard_size": _SHARD_SIZE}


def _of_hyperparameters() -> list[Setting]:
    """The rows of all hyper-parameters that are not settings of another option."""
    names = [name for name, declared in DECLARATIONS.items() if not declared.option]
    ordered = [*_MOST_USED, *(name for name in names if name not in _MOST_USED)]
    rows = []
    for row in map(_of_hyperparameter, ordered):
        if row.key in _WORKED_OUT:
            rows.append(replace(row, commands=("server",)))
            rows.append(replace(row, commands=("train",), default=None, shown_default=_WORKED_OUT[row.key]))
        else:
            rows.append(row)
    return rows


def _of_hyperparameter(name: str) -> Setting:
    declared = DECLARATIONS[name]
    shown = defaults_of(name) if declared.other_defaults else ""
    return Setting(
        name, ("server", "train"), of_hyperparameter(name), DEFAULTS[name],
        "Most used" if name in _MOST_USED else declared.heading,
        help=declared.help, shown_default=_SHOWN.get(name, shown), fixed=declared.fixed,
    )  # fmt: skip


def defaults_of(name: str) -> str:
    """What users read as the default of a hyper-parameter, such as "1; 1.5 with --optimizer adam, adamw"."""
    options: dict[str, list[str]] = {}  # by the value and what it goes with
    for (other, word), value in DECLARATIONS[name].other_defaults.items():
        of_rule = word if other == "rule_options" else f"{other}={word}"
        option, text = ("--optimizer", word) if other == "optimizer" else ("--rule", f"gem:{of_rule}")
        options.setdefault(f"{value:g} with {option} ", []).append(text)
    default = DEFAULTS[name]
    shown = default if isinstance(default, str) else f"{default:g}"
    return "; ".join([shown, *(option + ", ".join(words) for option, words in options.items())])


_MEMBERS: tuple[Command, ...] = ("worker", "evaluator")
_TRAINING: tuple[Command, ...] = ("train", "worker")
_CLIENTS: tuple[Command, ...] = (*_MEMBERS, "ctl")

# In the order of --help.
ALL_SETTINGS: tuple[Setting, ...] = (
    Setting("server", _MEMBERS, SERVER_ADDRESS, "127.0.0.1:50051", "Most used", by_deployment=True,
        help="Address of the server."),
    Setting("server", ("ctl",), SERVER_ADDRESS, None, "Most used",
        shown_default="the server of the run in --runs, else 127.0.0.1:50051", by_deployment=True,
        help="The server's address."),
    Setting("task", (*_TRAINING, "evaluator"), click.STRING, "digits", "Most used", fixed=True, handed_over=True,
        by_deployment=True,
        help=f"Task to train: {', '.join(BUILT_IN_TASKS)}, or your own as module:Class."),
    Setting("data", (*_TRAINING, "evaluator"), click.Path(path_type=Path), None, "Most used", fixed=True, handed_over=True,
        by_deployment=True, help="Folder with the task's data, if the task needs one."),
    Setting("workers", ("train",), Whole(1, 1000), 4, "Most used", help="Number of workers."),
    Setting("until_stopped", ("server", "train"), click.BOOL, False, "Run",
        help="Train without a limit of epochs or steps, until the server is stopped or your own loop ends."),
    *_of_hyperparameters(),
    *(replace(each.metadata["setting"], key=each.name) for each in fields(ServerSettings)),
    Setting("device", (*_TRAINING, "evaluator"), click.STRING, "cpu", "Most used", handed_over=True,
        help="Device to compute on: cpu, cuda, cuda:N, xpu, mps, or auto, which deals the machine's GPUs to the workers."),
    Setting("resume_run", ("train",), RunToResume(exists=True, file_okay=False, path_type=Path), None, "Most used",
        spelling="--resume", name="resume", variables=("GEM_RESUME_RUN", "GEM_RESUME"),
        help="Resume the run in this folder with its stored options; some may be given anew. In an empty folder a new run "
        "begins, so that the same command starts a run and goes on with it."),
    Setting("runs", ("train",), FOLDER, Path("runs"), "Run", help="Folder in which the run's own folder is created."),
    Setting("runs", ("ctl",), FOLDER, Path("runs"), "Run",
        help="Folder with gem-train's runs. Without --server, the run in progress there is used."),
    Setting("evaluate_every", ("train",), Number(0.1), 2.0, help="Minimum seconds between two evaluations."),
    Setting("evaluate_every", ("evaluator",), Number(0.1), 5.0, help="Minimum seconds between two evaluations."),
    Setting("once", ("evaluator",), click.BOOL, False, "Run", by_deployment=True,
        help="Evaluate once, as soon as the server has a model, and exit."),
    Setting("servers", ("train",), Whole(1, MAX_RANGES), 1, "Cluster",
        help="Number of server processes, each of which holds a part of the model. Several need --durability log."),
    Setting("workers_per_process", ("worker",), Whole(1, 1000), 1, "Cluster", spelling="--workers",
        help="Workers in this process, each with its own thread and session; several are named NAME-0, NAME-1 …"),
    Setting("processes", ("train",), Whole(1, 1000), None, "Cluster", shown_default="one for each worker",
        help="Number of processes for the workers. Fewer take less memory: 100 workers fit into 2."),
    Setting("name", ("worker",), click.STRING, None, "Cluster", by_deployment=True,
        help="Name of the worker, unique in the run. Default: host name, process id and a random suffix."),
    Setting("first_worker", ("worker",), Whole(0), 0, "Cluster", by_deployment=True,
        help="Number of the process's first worker, for names and for --device auto."),
    Setting("stopped_status", ("worker",), Whole(0, 255), 0, by_deployment=True,
        help="Exit status after SIGTERM or Ctrl-C. After 143 Kubernetes replaces the worker."),
    Setting("on", ("train",), click.Choice(["local", "ray"]), "local", "Cluster",
        help="Where the workers run: local, as processes here, or ray, as actors in a cluster. Servers always run here."),
    Setting("ray_address", ("train",), click.STRING, "auto",
        help="Ray cluster to use. HOST:PORT; auto: this machine's; local: a new one on this machine alone."),
    Setting("ray_labels", ("train",), click.STRING, "", shown_default="any node",
        help="Labels that a Ray node must have to run workers: NAME=VALUE,...; a value may also be !VALUE, in(A,B) or "
        "!in(A,B)."),
    Setting("ray_spread", ("train",), click.BOOL, False,
        help="Run the workers on as many Ray nodes as possible."),
    Setting("resources", ("train",), click.STRING, "CPU=1", "Cluster", metavar="NAME=AMOUNT,...",
        help="Ray's resources for each process of workers, such as CPU=1,GPU=0.5. With GPU, --device is auto unless given."),
    Setting("working_dir", ("train",), click.Path(exists=True, file_okay=False), None, "Cluster",
        help="Folder that Ray copies to each node: the one with your task's module."),
    Setting("timeout", ("ctl",), Number(0.1), 10.0, help="Seconds to wait for the server's response."),
    Setting("give_up_after", _MEMBERS, Number(0), 300.0, help="Seconds to keep retrying an unreachable server."),
    # A server and a worker may share the environment.
    Setting("worker_metrics_listen", ("worker",), click.STRING, "", "Network", spelling="--metrics-listen",
        name="metrics_listen", by_deployment=True, variables=("GEM_WORKER_METRICS_LISTEN", "GEM_METRICS_LISTEN"),
        help="Address to serve Prometheus metrics on, host:port."),
    Setting("overlap", _TRAINING, click.BOOL, False, "Network", spelling="--overlap/--no-overlap", handed_over=True,
        help="Compute the next gradient while a commit is in progress. Staleness about doubles."),
    Setting("gradient_dtype", _TRAINING, click.Choice(WIRE_NAMES), "float32", "Network", handed_over=True,
        help="Format of gradients sent over the network. int8 has one scale per 256 elements, and error feedback."),
    Setting("theta_dtype", _TRAINING, click.Choice(WIRE_NAMES), "float32", "Network", handed_over=True,
        help="Format of parameters sent over the network; not used with shared memory. int8 sends their changes."),
    Setting("shared_memory", _TRAINING, click.BOOL, True, handed_over=True, by_deployment=True,
        help="Exchange tensors through shared memory if the server runs on this machine."),
    Setting("durability", ("train",), click.Choice(DURABILITIES), "snapshot", "Durability",
        shown_default="snapshot; log with several --servers",
        help="What survives a crash of a server. memory: nothing; snapshot: all up to the last checkpoint (one every 10 "
        "seconds); log: every acknowledged commit."),
    Setting("backup_keep", ("ctl",), Whole(1), None,
        help="Number of a run's backups that gem-ctl checkpoint --to keeps. Unset: all."),
    Setting("tls_cert", ("server",), FILE, None, "Security", by_deployment=True,
        help="Encrypt: the server's certificate chain, PEM. Read again when it changes."),
    Setting("tls_key", ("server",), FILE, None, "Security", by_deployment=True, help="The certificate's private key, PEM."),
    Setting("tls_client_ca", ("server",), FILE, None, by_deployment=True,
        help="Reject clients without a certificate from these authorities, PEM."),
    # A file, because every user of the machine can read a process's arguments.
    Setting("token_file", _CLIENTS, FILE, None, "Security", by_deployment=True,
        help="File that holds only the bearer token for the server."),
    Setting("tls_ca", _CLIENTS, FILE, None, "Security", by_deployment=True,
        help="PEM file of the certificate authorities to trust for the server. Turns on TLS."),
    Setting("tls_cert", _CLIENTS, FILE, None, by_deployment=True,
        help="PEM file of this client's certificate, for servers that require one (mutual TLS)."),
    Setting("tls_key", _CLIENTS, FILE, None, by_deployment=True,
        help="PEM file of the private key of the client's certificate."),
    Setting("threads", _MEMBERS, Whole(1), 1, "Advanced", help="Number of threads that PyTorch uses."),
    Setting("step_seconds", _TRAINING, Times(), "0", fixed=True, handed_over=True,
        help="Simulated compute time: the minimum time for the gradient of a whole batch, and for a share of one in "
        "proportion; the worker sleeps for the rest. The workers take several numbers in turn: with 0.1,0.1,0.1,0.4 every "
        "fourth one is slow. For experiments on few cores."),
    Setting("turns", _TRAINING, click.Choice(["random", "fixed"]), "random", fixed=True, handed_over=True,
        help="Which worker computes next if a process has more workers than cores. random: any that waits. fixed: first come, "
        "first served, so that they commit in lockstep; for experiments."),
    Setting("log_format", ("server", *_MEMBERS), click.Choice(LOG_FORMATS), "text",
        help="Format of the logs on standard error."),
    Setting("log_level", ("server", *_TRAINING, "evaluator"), click.Choice(LOG_LEVELS), "info", "Advanced", handed_over=True,
        help="Least important log lines to write."),
)  # fmt: skip
KEYS = tuple(sorted({row.key for row in ALL_SETTINGS}))


def settings_of(command: Command) -> dict[str, Setting]:
    """The settings that a command takes, by their keys."""
    return {row.key: row for row in ALL_SETTINGS if command in row.commands}
