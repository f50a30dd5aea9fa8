"""API dialects: how responses, messages and tool calls are written in the words of other APIs."""
