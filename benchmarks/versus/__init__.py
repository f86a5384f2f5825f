"""Time to a loss: this server beside what a user would take instead, where workers are equal and where they are not."""
