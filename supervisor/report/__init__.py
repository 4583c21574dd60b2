"""The post-mortem of a job: one document, and the same as Markdown.

In: what a session or a recording tells. Out: JSON data without secrets; text.
"""
