"""A lease on a prefix with an image in it holds what it says, and only its own hits renew it."""

from ostinato.core.identity import ImageSpan
from ostinato.tenants.terms import LeaseStatus, LeaseTerms
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import tiny_cache

CAT, DOG = ImageSpan(b"cat", 2, 4), ImageSpan(b"dog", 2, 4)


def test_a_lease_that_ends_within_an_image_holds_all_that_its_receipt_says(index):
    """The cat covers tokens 2 to 5; the lease of seven tokens ends with the block of 0 to 3."""
    cache = tiny_cache(4, index=index)
    cache.serve("ABCCCCG", images=[CAT])

    receipt = cache.prefix_cache.admin.lease(prefix_key("ABCCCCG", [CAT]), LeaseTerms())

    assert (receipt.status, receipt.num_tokens) == (LeaseStatus.ACCEPTED, 4)
    assert cache.prefix_cache.admin.num_leased_blocks == 1
    assert cache.picture().startswith("ABCC:held")


def test_a_hit_on_another_image_does_not_renew_a_lease(cache):
    """Where the cat is, a dog may stand in a prompt of the very same token ids."""
    cache.serve("ABCCCCGH", images=[CAT])
    cache.serve("ABCCCCGH", images=[DOG])
    admin = cache.prefix_cache.admin
    admin.lease(prefix_key("ABCCCCGH", [CAT]), LeaseTerms(2.5, refresh_on_hit=True))

    cache.serve("ABCCCCGHI", images=[DOG])
    cache.serve("ABCCCCGHJ", images=[CAT])
    cache.serve("ABCCCCGHK", images=[DOG])
    admin.expire()
    assert admin.num_leases == 1, "the cat's own hit renewed it"

    cache.serve("ABCCCCGHL", images=[DOG])
    cache.serve("ABCCCCGHM", images=[DOG])
    admin.expire()
    assert admin.num_leases == 0
