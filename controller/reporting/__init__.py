"""What a person sees of a run: metrics, trace, live display, log, report and summary. Nothing here blocks the loop."""
