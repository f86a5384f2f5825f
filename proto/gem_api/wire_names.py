"""The names of the wire formats, for command lines: `gem_api.wire`, which has the formats, needs NumPy."""

WIRE_NAMES = ("float32", "bfloat16", "int8")
