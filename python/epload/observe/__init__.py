"""Shows a load while it runs and afterwards: a progress bar, events, traces and plots."""
