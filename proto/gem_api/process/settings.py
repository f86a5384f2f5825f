"""The settings of all commands, each in one row.

All else derives from the rows: options and --help, the keys of the file of --config, the fields of `ServerConfig`, what
gem-train hands to its servers and workers, what a resumed run keeps, docs/settings.md, and the schema of the Helm chart. The
rows of hyper-parameters are made from their declarations in `gem_api.hyperparameters`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import click

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, flag
from gem_api.process.host_limits import default_limit
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
    Whole,
    of_hyperparameter,
    private_socket,
)
from gem_api.ranges import MAX_RANGES, WHOLE, Range
from gem_api.wire import WIRE_FORMATS

Command = Literal["server", "train", "worker", "evaluator", "ctl"]  # gem-server, gem-train, ...
DURABILITIES = ("memory", "snapshot", "log")  # what survives a crash of the server
BUILT_IN_TASKS = ("digits", "mnist")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Under these --help lists the options, in this order. Those of other packages come last.
HEADINGS = (
    "Most used", "Run", "Cluster", "Network", "Durability", "Rule", "Steps of the workers", "Security", "Advanced", "Options",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A setting of one command, or of several that mean the same.

    Attributes:
        key: Its name in the file of --config. GEM_ and the key in upper case is its environment variable.
        commands: The commands that take it.
        default: The value if the user gives none, or a function that returns it.
        help: What users read about it, with the unit.
        type: What its text may be, and what it is read as.
        option: The option, such as "--listen" or "--overlap/--no-overlap"; empty: only the file and the environment set it.
        heading: The heading that --help lists the option under, one of HEADINGS.
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
    default: Any
    help: str
    type: click.ParamType[Any] = click.STRING
    option: str = ""
    heading: str = ""
    shown_default: str = ""
    metavar: str = ""
    name: str = ""
    variables: tuple[str, ...] = ()
    fixed: bool = False
    handed_over: bool = False
    by_deployment: bool = False


def server_field(default: Any, help_: str, commands: tuple[Command, ...] = ("server",), **more: Any) -> Any:
    """A field of `ServerSettings`, and its row."""
    row = {"setting": Setting("", commands, default, help_, **more)}
    return field(default_factory=default, metadata=row) if callable(default) else field(default=default, metadata=row)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server as a configuration that other code reads. Each field is a row of ALL_SETTINGS too."""

    # fmt: off
    listen: str = server_field(
        "127.0.0.1:50051", "Address to serve gRPC on; 0.0.0.0:50051 accepts other machines.",
        option="--listen", heading="Most used", by_deployment=True,
    )
    checkpoint_dir: Path | None = server_field(
        None, "Folder for checkpoints; without it nothing is saved.",
        type=FOLDER, option="--checkpoint-dir", heading="Most used", by_deployment=True,
    )
    resume: bool = server_field(
        False, "Continue from the newest checkpoint in --checkpoint-dir, if there is one.",
        type=click.BOOL, option="--resume/--no-resume", heading="Most used", by_deployment=True,
    )
    min_workers: int = server_field(
        1, "Hand out the first shard only after this number of workers has joined, so that all start together.",
        type=Whole(1), option="--min-workers", heading="Cluster", handed_over=True,
    )
    start_quiet_seconds: float = server_field(
        0.0,
        "A new run hands out the first shard once no further worker has joined for this number of seconds, so that all start "
        "together although their number is not known; 10 minutes after the first one joined at the latest. min_workers counts "
        "beside it. A resumed run does not wait.",
        type=Number(0), handed_over=True,
    )
    range: Range = server_field(
        WHOLE,
        "Which part of the model this server holds, if N servers hold it together: 0/N, which leads, to N-1/N. Otherwise give "
        "all of them the same options, among them --durability log.",
        type=PART, option="--range", heading="Network", by_deployment=True,
    )
    peers: tuple[str, ...] = server_field(
        (), "On the server of range 0: the addresses of ranges 1, 2, ..., in this order, as workers reach them.",
        type=ADDRESSES, option="--peers", heading="Network", by_deployment=True,
    )
    # None: auto. Empty: off.
    lane_listen: str | None = server_field(
        None,
        "Address of the lane, a second port that carries workers' commits faster than gRPC does. auto: the host of --listen, "
        "and the port after its port, or a free one if that is taken; off: commits of other machines go over gRPC.",
        type=LANE_LISTEN, shown_default="auto", by_deployment=True,
    )
    metrics_listen: str = server_field(
        "127.0.0.1:9464",
        "Address of the live page (/), the Prometheus metrics (/metrics) and the probes (/healthz, /readyz); empty: none of "
        "them is served.",
        option="--metrics-listen", heading="Network", by_deployment=True,
    )
    # Begins with @ if the socket has no file. Empty: off.
    memory_socket: str = server_field(
        private_socket,
        "Unix socket of the lane for workers on this machine, who share memory with the server: no tensor goes over the "
        "network. auto: a socket without a file; a path: in a folder that containers share; off: no shared memory.",
        type=MEMORY_SOCKET, shown_default="auto", handed_over=True, by_deployment=True,
    )
    durability: str = server_field(
        "snapshot",
        "What survives a crash. memory: only checkpoints made on request; snapshot: everything up to the last checkpoint; "
        "log: every acknowledged commit.",
        type=click.Choice(DURABILITIES), option="--durability", heading="Durability",
        shown_default="snapshot with --checkpoint-dir, else memory", handed_over=True,
    )
    checkpoint_interval: float = server_field(
        30.0, "Seconds between checkpoints; 0: only on request and at the end.", type=Number(0), handed_over=True
    )
    checkpoint_keep: int = server_field(3, "Checkpoints to keep; older ones are removed.", type=Whole(1), handed_over=True)
    log_limit: int = server_field(
        1 << 30, "With --durability log: write a checkpoint when the log since the last one exceeds this size.",
        type=Bytes(), shown_default="1G", handed_over=True,
    )
    # /dev/null: none.
    history: Path | None = server_field(
        None,
        "CSV file that gets a line for every commit, of some 100 bytes; /dev/null: none. A new run renames an existing file "
        "to FILE.old.",
        type=FILE, option="--history", heading="Durability", shown_default="commits.csv in --checkpoint-dir",
    )
    tokens: Path | None = server_field(
        None,
        "File of bearer tokens; clients without one are rejected. Each line is TOKEN ROLE [WORKER], with the role worker, "
        "evaluator or admin. Read again when it changes.",
        type=FILE, option="--tokens", heading="Security", by_deployment=True,
    )
    max_norm_ratio: float = server_field(
        0.0, "Reject a commit if its gradient's norm exceeds this multiple of the median of the run's last 100; 0: no bound. "
        "Honest runs have reached 50.",
        type=Number(0), handed_over=True,
    )
    quarantine_after: int | None = server_field(
        None, "Quarantine a worker after this number of rejected gradients in a row (too large, NaN or infinite); 0: never. "
        "It stays out of the run until gem-ctl quarantine lifts it.",
        type=Whole(0), shown_default="3 with max_norm_ratio, else 0", handed_over=True,
    )
    memory_limit: int = server_field(
        default_limit, "Memory that the model and the workers may take, for example 8G; 0: no limit.",
        type=Bytes(), shown_default="4/5 of the machine's or container's", handed_over=True,
    )
    apply_threads: int = server_field(
        0, "Threads that apply a commit of a large model; 0: one for each core, at most 8.", type=Whole(0), handed_over=True
    )
    lease_seconds: float = server_field(
        15.0, "How long a worker may be silent before its lease ends, in seconds.",
        type=Number(1, 3600), commands=("server", "train"), handed_over=True,
    )
    # fmt: on


# The hyper-parameters among the options that are used most, in the order of --help.
_MOST_USED = ("epochs", "steps", "batch_size", "learning_rate", "optimizer")
_SHARD_SIZE = "256, or the next multiple of --batch-size; with batch_variation at least 4 commits"
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
    others = [f"{value:g} with {_in_words(other, word)}" for (other, word), value in declared.other_defaults.items()]
    shown = "; ".join([f"{DEFAULTS[name]:g}", *others]) if others else ""
    return Setting(
        name,
        ("server", "train"),
        DEFAULTS[name],
        declared.help,
        type=of_hyperparameter(name),
        option=flag(name) if declared.flag else "",
        heading="Most used" if name in _MOST_USED else declared.heading,
        shown_default=_SHARD_SIZE if name == "shard_size" else shown,
        fixed=declared.fixed,
    )


def _in_words(name: str, word: str) -> str:
    return f"--rule gem:{word}" if name == "rule_options" else f"{flag(name)} {word}"


_MEMBERS: tuple[Command, ...] = ("worker", "evaluator")
_TRAINING: tuple[Command, ...] = ("train", "worker")
_CLIENTS: tuple[Command, ...] = (*_MEMBERS, "ctl")

# In the order of --help.
ALL_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "server", _MEMBERS, "127.0.0.1:50051", "Address of the server.", type=SERVER_ADDRESS, option="--server",
        heading="Most used", by_deployment=True,
    ),
    Setting(
        "server", ("ctl",), None, "The server's address.", type=SERVER_ADDRESS, option="--server", heading="Most used",
        shown_default="the server of the run in --runs, else 127.0.0.1:50051", by_deployment=True,
    ),
    Setting(
        "task", (*_TRAINING, "evaluator"), "digits",
        f"Task to train: {', '.join(BUILT_IN_TASKS)}, or your own as module:Class.",
        option="--task", heading="Most used", fixed=True, handed_over=True, by_deployment=True,
    ),
    Setting(
        "data", (*_TRAINING, "evaluator"), None, "Folder with the task's data, if the task needs one.",
        type=click.Path(path_type=Path), option="--data", heading="Most used", fixed=True, handed_over=True,
        by_deployment=True,
    ),
    Setting("workers", ("train",), 4, "Number of workers.", type=Whole(1, 1000), option="--workers", heading="Most used"),
    Setting(
        "until_stopped", ("server", "train"), False,
        "Train without a limit of epochs or steps, until the server is stopped or your own training loop ends.",
        type=click.BOOL, option="--until-stopped", heading="Run",
    ),
    *_of_hyperparameters(),
    *(replace(each.metadata["setting"], key=each.name) for each in fields(ServerSettings)),
    Setting(
        "device", (*_TRAINING, "evaluator"), "cpu",
        "Device to compute on: cpu, cuda, cuda:N, mps, or auto. auto deals the machine's CUDA devices to the workers in turn.",
        option="--device", heading="Most used", handed_over=True,
    ),
    Setting(
        "resume_run", ("train",), None,
        "Resume the run in this folder with its stored options. Options given now replace those that may change. In an empty "
        "folder a new run begins, so that the same command starts a run and goes on with it.",
        type=RunToResume(exists=True, file_okay=False, path_type=Path), option="--resume", heading="Most used",
        name="resume", variables=("GEM_RESUME_RUN", "GEM_RESUME"),
    ),
    Setting(
        "runs", ("train",), Path("runs"), "Folder in which the run's own folder is created.",
        type=FOLDER, option="--runs", heading="Run",
    ),
    Setting(
        "runs", ("ctl",), Path("runs"),
        "Folder with gem-train's runs. Without --server, the run in progress there is used.",
        type=FOLDER, option="--runs", heading="Run",
    ),
    Setting("evaluate_every", ("train",), 2.0, "Minimum seconds between two evaluations.", type=Number(0.1)),
    Setting("evaluate_every", ("evaluator",), 5.0, "Minimum seconds between two evaluations.", type=Number(0.1)),
    Setting(
        "once", ("evaluator",), False, "Evaluate once, as soon as the server has a model, and exit.",
        type=click.BOOL, option="--once", heading="Run", by_deployment=True,
    ),
    Setting(
        "servers", ("train",), 1,
        "Number of server processes, each of which holds a part of the model. Several need --durability log, their default.",
        type=Whole(1, MAX_RANGES), option="--servers", heading="Cluster",
    ),
    Setting(
        "workers_per_process", ("worker",), 1,
        "Workers in this process, each with its own thread and session. If several, they are named NAME-0, NAME-1 …",
        type=Whole(1, 1000), option="--workers", heading="Cluster",
    ),
    Setting(
        "processes", ("train",), None,
        "Number of processes for the workers. Fewer processes take less memory: 100 workers fit into 2.",
        type=Whole(1, 1000), option="--processes", heading="Cluster", shown_default="one for each worker",
    ),
    Setting(
        "name", ("worker",), None,
        "Name of the worker, unique in the run. Default: host name, process id and a random suffix.",
        option="--name", heading="Cluster", by_deployment=True,
    ),
    Setting(
        "first_worker", ("worker",), 0,
        "Number of the process's first worker, for names of several workers and for --device auto.",
        type=Whole(0), option="--first-worker", heading="Cluster", by_deployment=True,
    ),
    Setting(
        "stopped_status", ("worker",), 0,
        "Exit status after SIGTERM or Ctrl-C. 143 tells Kubernetes that the run is not done, so that it replaces the worker.",
        type=Whole(0, 255), by_deployment=True,
    ),
    Setting(
        "on", ("train",), "local",
        "Where the workers run: as processes on this machine, or as actors in a Ray cluster. Servers always run here.",
        type=click.Choice(["local", "ray"]), option="--on", heading="Cluster",
    ),
    Setting(
        "ray_address", ("train",), "auto",
        "Ray cluster to use. HOST:PORT; auto: the one that this machine belongs to; local: a new one on this machine alone.",
    ),
    Setting(
        "ray_labels", ("train",), "",
        "Labels that a node of the Ray cluster must have to run workers. NAME=VALUE,...; a value may also be !VALUE, in(A,B) "
        "or !in(A,B).",
        shown_default="any node",
    ),
    Setting(
        "ray_spread", ("train",), False, "Run the workers on as many nodes of the Ray cluster as possible.", type=click.BOOL
    ),
    Setting(
        "resources", ("train",), "CPU=1",
        "Ray's resources for each process of workers, such as CPU=1,GPU=0.5. With GPU, --device is auto unless given.",
        option="--resources", heading="Cluster", metavar="NAME=AMOUNT,...",
    ),
    Setting(
        "working_dir", ("train",), None,
        "Folder that Ray copies to each node, and in which the workers start: the one with your task's module.",
        type=click.Path(exists=True, file_okay=False), option="--working-dir", heading="Cluster",
    ),
    Setting("timeout", ("ctl",), 10.0, "Seconds to wait for the server's response.", type=Number(0.1)),
    Setting("give_up_after", _MEMBERS, 300.0, "Seconds to keep retrying an unreachable server.", type=Number(0)),
    Setting(
        "worker_metrics_listen", ("worker",), "", "Address to serve Prometheus metrics on, host:port; empty for none.",
        option="--metrics-listen", heading="Network", name="metrics_listen", by_deployment=True,
        variables=("GEM_WORKER_METRICS_LISTEN", "GEM_METRICS_LISTEN"),  # a server may share the environment
    ),
    Setting(
        "overlap", _TRAINING, False,
        "Compute the next gradient while a commit is in progress. Staleness about doubles; worth it on a slow network.",
        type=click.BOOL, option="--overlap/--no-overlap", heading="Network", handed_over=True,
    ),
    Setting(
        "gradient_dtype", _TRAINING, "float32",
        "Format of gradients sent over the network. int8 has one scale per 256 elements, and error feedback.",
        type=click.Choice(list(WIRE_FORMATS)), option="--gradient-dtype", heading="Network", handed_over=True,
    ),
    Setting(
        "theta_dtype", _TRAINING, "float32",
        "Format of parameters sent over the network; not used with shared memory. int8 sends their changes.",
        type=click.Choice(list(WIRE_FORMATS)), option="--theta-dtype", heading="Network", handed_over=True,
    ),
    Setting(
        "shared_memory", _TRAINING, True,
        "Exchange tensors through shared memory if the server runs on this machine and offers it.",
        type=click.BOOL, handed_over=True, by_deployment=True,
    ),
    Setting(
        "durability", ("train",), "snapshot",
        "What survives a crash of a server. memory: nothing; snapshot: everything up to the last checkpoint (one every 10 "
        "seconds); log: every acknowledged commit.",
        type=click.Choice(DURABILITIES), option="--durability", heading="Durability",
        shown_default="snapshot; log with several --servers",
    ),
    Setting(
        "backup_keep", ("ctl",), None, "Number of a run's backups that gem-ctl checkpoint --to keeps. Unset: all.",
        type=Whole(1),
    ),
    Setting(
        "tls_cert", ("server",), None, "Encrypt: the server's certificate chain, PEM. Read again when it changes.",
        type=FILE, option="--tls-cert", heading="Security", by_deployment=True,
    ),
    Setting(
        "tls_key", ("server",), None, "The certificate's private key, PEM.",
        type=FILE, option="--tls-key", heading="Security", by_deployment=True,
    ),
    Setting(
        "tls_client_ca", ("server",), None, "Reject clients without a certificate from these authorities, PEM.",
        type=FILE, by_deployment=True,
    ),
    Setting(  # a file, because every user of the machine can read a process's arguments
        "token_file", _CLIENTS, None, "File that holds only the bearer token for the server.",
        type=FILE, option="--token-file", heading="Security", by_deployment=True,
    ),
    Setting(
        "tls_ca", _CLIENTS, None, "PEM file of the certificate authorities to trust for the server. Turns on TLS.",
        type=FILE, option="--tls-ca", heading="Security", by_deployment=True,
    ),
    Setting(
        "tls_cert", _CLIENTS, None, "PEM file of this client's certificate, for servers that require one (mutual TLS).",
        type=FILE, by_deployment=True,
    ),
    Setting(
        "tls_key", _CLIENTS, None, "PEM file of the private key of the client's certificate.", type=FILE, by_deployment=True
    ),
    Setting(
        "threads", _MEMBERS, 1, "Number of threads that PyTorch uses.", type=Whole(1), option="--threads", heading="Advanced"
    ),
    Setting(
        "step_seconds", _TRAINING, 0.0,
        "Simulated compute time: the minimum time for the gradient of a whole batch; the worker sleeps for the rest. With "
        "batch_variation or smallest_share it is in proportion to the batch. For experiments on machines with few cores.",
        type=Number(0), fixed=True, handed_over=True,
    ),
    Setting(
        "turns", _TRAINING, "random",
        "Which worker computes next if a process has more workers than cores. random: any that waits. fixed: first come, "
        "first served, so that they commit in lockstep, as workers on equal machines do, even with "
        "batch_variation; for experiments.",
        type=click.Choice(["random", "fixed"]), fixed=True, handed_over=True,
    ),
    Setting(
        "log_format", ("server", *_MEMBERS), "text", "Format of the logs on standard error.", type=click.Choice(LOG_FORMATS)
    ),
    Setting(
        "log_level", ("server", *_TRAINING, "evaluator"), "info", "Least important log lines to write.",
        type=click.Choice(LOG_LEVELS), option="--log-level", heading="Advanced", handed_over=True,
    ),
)  # fmt: skip
KEYS = frozenset(row.key for row in ALL_SETTINGS)


def settings_of(command: Command) -> dict[str, Setting]:
    """The settings that a command takes, by their keys."""
    return {row.key: row for row in ALL_SETTINGS if command in row.commands}
