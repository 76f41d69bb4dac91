"""The module debugger of transformers: its files, from a trace of this process or of all ranks."""
