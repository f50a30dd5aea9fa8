"""The master's HTTP door: OpenAI's endpoints, those of the seeds, figures, and a page.

Refuses to know how requests are led. Needs the extra `http`; nothing here is imported without it.
"""
