"""Who may call: tokens, certificates, roles, and warnings about what is open."""
