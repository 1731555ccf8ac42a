"""The op library that binds variables, from its sources to the loaded functions.

- `_load` finds it in the package or in the cache, else has it compiled there, and loads it.
- `_compile` calls the compiler, and writes and reads what a library was compiled for.
- `_cache` is the folder for it: the user's own, locked among processes.
"""
