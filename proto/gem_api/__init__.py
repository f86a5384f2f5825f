"""The contract between workers and the parameter server: messages, tensor framing and errors."""

__version__ = "0.1.0"
