"""The HTTP API: OpenAI's endpoints, the legacy ones, metrics, and a status page.

This package does not know how requests are run. It needs the extra `http`, without which it is not imported.
"""
