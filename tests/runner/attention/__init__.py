"""Do scattered blocks read like one row?"""
