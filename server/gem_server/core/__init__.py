"""The run as one state machine: everything that the server decides. Pure: no I/O, no clock, no gRPC."""
