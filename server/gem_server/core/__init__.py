"""The run as one state machine: what the server decides. Pure: no I/O, no clock, no gRPC."""
