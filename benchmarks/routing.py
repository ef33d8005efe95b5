import sys, time
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from ostinato.core.config import SchedulerConfig
from ostinato.settings import PrefixCacheConfig
from ostinato.lab.cost_model import ASSUMED
from ostinato.lab.fleet_replay import FleetConfig, replay_fleet
from ostinato.lab.timed_replay import slowed_to_fit, spell
from ostinato.lab.traces import read_npz
from ostinato.router import Router, RouterConfig, RouteRequest
from ostinato.router.events import EventBatch, Stored, Removed, Cleared
from ostinato.observe import events as ev

def converted(batch):
    out=[]
    for e in batch.events:
        if isinstance(e, ev.BlockStored): out.append(Stored(e.digests,e.parent,e.tokens,e.block_size,group=e.group,is_window=e.group>0))
        elif isinstance(e, ev.BlockRemoved): out.append(Removed(e.digests,group=e.group))
        else: out.append(Cleared())
    return EventBatch(batch.sequence,batch.time_s,tuple(out))

DEC = lambda self, number: 256
class Driver:
    def __init__(self, trace, n, policy, events=True):
        self.trace=trace; self.router=Router(RouterConfig(policy, max_tokens=10**9))
        for i in range(n): self.router.add_worker(str(i), block_size=trace.block_tokens)
        self.d={}; self.sessions={}
        self.exp=0
    def route(self, number, now):
        t=self.trace
        path=t.path(number)
        prompt=spell(path,t.block_tokens,int(t.input_tokens[number]),number)
        d=self.router.route(RouteRequest(prompt, max_tokens=DEC(self,number)),now)
        self.exp+=d.expected_cached_tokens
        self.d[number]=d
        return int(d.worker)
    def first_token(self,n,now): self.router.first_token(self.d[n],now)
    def finished(self,n,now): self.router.finished(self.d.pop(n),now)
    def failed(self,n,now): self.router.failed(self.d.pop(n),now)
    def events(self,r,b,now): self.router.apply(str(r),converted(b),now)
    def lost(self,r,now): self.router.remove(str(r))
    def back(self,r,now): self.router.add_worker(str(r),block_size=self.trace.block_tokens)

if __name__=="__main__":
    name=sys.argv[1]; policy=sys.argv[2]; n=int(sys.argv[3]) if len(sys.argv)>3 else 4000
    slow=float(sys.argv[4]) if len(sys.argv)>4 else 0
    trace=read_npz(Path("/work/shared/data")/f"{name}.npz").first(n)
    blocks=int(sys.argv[5]) if len(sys.argv)>5 else 1000
    sched=SchedulerConfig(max_num_batched_tokens=8192) if True else None
    one=slowed_to_fit(trace,ASSUMED)
    slow= slow or one/8
    t0=time.process_time()
    for k,b in ((8,blocks),) if policy!="pool" else ((1,blocks*8),):
        cache=PrefixCacheConfig(block_size=trace.block_tokens,num_blocks=b,keep_event_batches=16 if policy=="cache_state" else 0)
        d=Driver(trace,k,"cache_state" if policy=="pool" else policy)
        r=replay_fleet(trace,FleetConfig(k,cache,sched,ASSUMED,slowdown=slow),d)
        print(f"{name} {policy} n={len(trace)} slow={slow:.3f} hit={r.hit_ratio:.4f} exp={d.exp/r.input_tokens:.3f} imb={r.imbalance:.3f} mean={r.mean_first_token_s:.3f} p50={r.percentile(50):.3f} p99={r.percentile(99):.3f} busy={np.mean(r.busy_s)/(trace.duration_s*slow):.2f} cpu={time.process_time()-t0:.1f}")
