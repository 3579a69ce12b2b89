"""What a run leaves behind: run folder, metrics, console, W&B mirror, memory record and report. Steers nothing."""
