"""How good a tree is: metrics, mistakes, votes of several trees, tables and plots.

Imports training and what lies below.
"""
