"""What is kept from process to process, in one folder.

files.py        the folder, and the one way to read, write and lock in it
modules.py      generated modules, by everything that their text depends on
prune.py        what lies there, and what of it goes
tuned.py        schedules that tuning found fastest
calibrated.py   what `weft calibrate` measured of a machine
shelf.py        compiled templates
"""
