"""What calls need besides the face: what every call reads, what torch hands to some, and how results are merged."""
