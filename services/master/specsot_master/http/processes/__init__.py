"""HTTP in processes of its own, so that the engine's core only runs requests.

An API process owns connections of clients: it parses bodies, renders and tokenizes prompts, and writes
responses. It knows no ring, no queue and no journal: what it needs of them, it asks the engine.
"""
