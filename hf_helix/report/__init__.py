"""What people look at: timelines, heat maps, traces, the scorecard and log entries, as text and pictures."""
