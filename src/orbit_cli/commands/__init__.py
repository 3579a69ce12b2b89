"""One module per command: compose the config, call one function, print its result."""
