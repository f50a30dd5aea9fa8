"""The HTTP API: OpenAI's endpoints, the legacy ones, metrics, and a status page.

Refuses to know how requests are run. Needs the extra `http`; nothing here is imported without it.
"""
