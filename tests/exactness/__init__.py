"""Does the cache change any answer, and is everything computed once?"""
