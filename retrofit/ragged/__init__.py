"""Predict many tables of any sizes: members of all tables padded into shared forward passes of a closed retrofit.

`planning` decides which members go together, `preparing` fits the tables in processes, `passes` runs the members
through the model, `predicting` puts these together, `groups` cuts one long table into many, and `report` says what
was done.
"""
