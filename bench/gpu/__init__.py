"""All that needs an accelerator, in parts that end in time."""
