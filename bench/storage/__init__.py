"""How fast saves are written and restored, beside raw disk and stock."""
