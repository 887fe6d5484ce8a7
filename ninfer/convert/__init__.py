"""Source checkpoints and artifacts as model sources, and the artifact writer."""
