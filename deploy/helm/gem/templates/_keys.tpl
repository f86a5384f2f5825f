{{/* Written by deploy/helm/generate.py. */}}
{{- define "gem.keys.server" -}}
["apply_threads", "average", "batch_size", "batch_variation", "checkpoint_interval", "checkpoint_keep", "durability", "epochs", "history", "learning_rate", "lease_seconds", "local_momentum", "local_steps", "log_format", "log_level", "log_limit", "max_norm_ratio", "memory_limit", "min_workers", "optimizer", "quarantine_after", "reply_wait", "rule", "schedule", "seed", "shard_size", "shards", "smallest_share", "start_quiet_seconds", "steps", "until_stopped", "weight_decay"]
{{- end -}}
{{- define "gem.keys.worker" -}}
["device", "give_up_after", "gradient_dtype", "log_format", "log_level", "overlap", "step_seconds", "theta_dtype", "threads", "turns", "workers_per_process"]
{{- end -}}
{{- define "gem.keys.evaluator" -}}
["device", "evaluate_every", "give_up_after", "log_format", "log_level", "threads"]
{{- end -}}
