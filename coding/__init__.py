"""Erasure and network codes: data that clients sent still decode after some of them drop out.

Nothing here knows Flower or a model; strategies and clients bring it there. Modules, lowest first:

- ``errors``: what can go wrong with coded data. ``stream``: the portable coefficient stream.
- ``kernels``: products of matrices over GF(2^8). ``field``, ``prime``: that field and prime fields, one interface.
- ``packet``: the bytes of a coded symbol. ``code``: what both codes share. ``elimination``, ``decoder``: receiving.
- ``rlnc``, ``mds``: random linear network coding, systematic Cauchy Reed-Solomon. ``encoder``: one or the other by its
  name. ``plan``: how many shards it takes.
- ``relay``, ``sumcode``, ``datacode``, ``gradcode``: the four constructions, compared in ``docs/background/coding.md``.
- ``transport``, ``sealing``, ``listener``: parcels between nodes, and who can read them. ``bench``: how fast it all is.

Importing any of them compiles nothing.
"""
