"""A ring without weights: stages and a drafter whose tokens are a hash of the text and whose time is a table.

Sequencer, links, judge, drafting engine and conductor around them are the product's own.
"""
