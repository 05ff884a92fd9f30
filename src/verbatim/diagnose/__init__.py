"""Tools that answer questions about a model: will it fit, is it sound, does it keep its promise
here, what does a setting change.

In: a config, a model file or a loaded engine. Out: frozen records, which the commands `plan`,
`doctor`, `verify`, `compare` and `drift` print as tables, plots or JSON.
"""
