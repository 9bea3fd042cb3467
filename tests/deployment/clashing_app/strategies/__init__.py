"""Folders that thousands of projects have, under the names of this project's own."""
