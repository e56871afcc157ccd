"""One window under the profiler."""
