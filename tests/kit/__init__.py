"""What the tests of several rooms share: real servers, raw clients, models, processes."""
