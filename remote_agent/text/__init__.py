"""Lines of text as rows, levels, patterns, filters, shapes and names; nodes and operators use it.

In: raw bytes and lines, patterns as typed. Out: visible text, text that a terminal may print, levels, compiled patterns
and filters, shapes that are equal for equal failures, ranges and counts. Imports `wire`.
"""
