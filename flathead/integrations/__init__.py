"""Flathead inside other people's trainers: one line each."""
