"""The engine process: schedule, run, update, report; one loop."""
