"""The engine: the step loop, its process boundary, and the text-level faces users call.

Knows: types, text, scheduling, and, in `build` alone, the runtime. Refuses to know: HTTP, clusters, commands.
"""
