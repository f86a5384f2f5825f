"""Workers, which compute gradients of a task on leased shards, and a launcher for a whole cluster on one machine."""
