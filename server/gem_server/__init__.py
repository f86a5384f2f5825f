"""The parameter server: holds the central variable and applies commits in FIFO order."""
