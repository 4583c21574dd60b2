/* Who may form a group: the rule of ARCHITECTURE.md, "Who decides", and nothing else: no time, no messages.

A message that is late is a step that happens late; one that is lost is a step that does not happen. A step reads what
two nodes know at one moment. A journal that replaces another one does so whole: until all of it is there, the old one
counts, so a transfer that is cut off is a step that does not happen. A cut link, a pause and a death with its disk are the same here: steps of that node with
others stay out, for as long as one likes. Time is the leases' affair: here, a coordinator holds its group while enough
nodes could still answer it, that is, while they have promised nothing to a newer term.

-DN=3 -DTERMS=3 -DGROUPS=4: how far it goes. -DALL=7: all nodes as bits.
Each of these takes one part of the rule away, and must be found out:
-DOWN_GROUP      a candidate counts by its own newest group, not by the newest that its voters know
-DANY_TIE        any coordinator may go on with exactly half, not the one alone that made the group
-DEARLY_GO       a group starts before enough nodes have written it down
-DLAST_ONLY      groups that may have formed are not asked beside the newest
-DNO_PROMISE     a node writes down what an older coordinator says after it has voted for a newer one
-DTORN_JOURNAL   a node whose journal is being replaced may keep the beginning of the new one
-DSAME_DISK      a node without its disk counts as the one that it was
*/

#ifndef N
#define N 3
#endif
#ifndef TERMS
#define TERMS 3
#endif
#ifndef GROUPS
#define GROUPS 4
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#define ALL ((1 << N) - 1)
#define NOBODY 7

/* The groups that were ever proposed. Group 0: the first. */
byte members[GROUPS];
byte disks[GROUPS];		/* which disks its members, and its author, had then, a bit a node */
byte author[GROUPS];
byte before[GROUPS];		/* the group before it in its author's journal */
byte groups = 1;

/* Of each node: on its disk */
byte promised[N];		/* the newest term that it has voted in or followed */
byte voted[N];
byte last[N];			/* the newest group in its journal */
byte formed[N];			/* the newest one that its journal knows to have formed */
byte written[N];		/* the term of its journal's last record */
byte disk = 0;			/* a bit a node, that changes when it loses its disk */
byte fresh = 0;			/* nodes with an empty journal */
byte losses = 0;

/* Of each node: what it knows while it coordinates */
bool leads[N];
bool asks[N];			/* its newest group is proposed, and has not formed */
byte acks[N];
byte runs[N];			/* the group that it has formed in this term; NOBODY: none */

inline count(mask, number) {
	number = 0;
	for (k : 0 .. N - 1) { if :: ((mask) >> k) & 1 -> number++ :: else fi }
}

/* Whether these nodes are enough of group g: more than half of its members, or half with its author */
inline enough(g, votes, who, result) {
	same = (votes) & (ALL ^ (disk ^ disks[g]));
#ifdef SAME_DISK
	same = (votes);
#endif
	count(members[g], whole);
	count(members[g] & same, half);
#ifdef ANY_TIE
	result = (2 * half > whole || (2 * half == whole && ((same >> who) & 1)));
#else
	result = (2 * half > whole || (2 * half == whole && ((same >> author[g]) & 1)));
#endif
}

/* ... of every group that may have formed: from the newest formed one on */
inline enough_of_all(head, base, votes, who, result) {
	g = head;
	enough(g, votes, who, result);
#ifndef LAST_ONLY
	do
	:: result && g != base -> g = before[g]; enough(g, votes, who, result)
	:: else -> break
	od
#endif
}

/* How many groups a journal's newest one comes after */
inline depth(g0, number) {
	g = g0; number = 0;
	do :: g != before[g] -> g = before[g]; number++ :: else -> break od
}

proctype node(byte me) {
	byte k, g, whole, half, same, votes, heard, v, head, base, when, one, other;
	bool yes;
	do
	/* It stands: some nodes promise it a new term, and the answers of some of those arrive */
	:: atomic {
		!leads[me] && promised[me] < TERMS && !((fresh >> me) & 1) ->
		select(votes : 1 .. ALL);
		if
		:: (votes >> me) & 1 ->
			yes = true;
			for (v : 0 .. N - 1) {
				if
				:: ((votes >> v) & 1) && (promised[v] > promised[me] || leads[v]) -> yes = false
				:: else
				fi
			}
			if
			:: yes ->
				when = promised[me] + 1;
				head = last[me]; base = formed[me]; one = written[me];
				for (v : 0 .. N - 1) {
					if
					:: (votes >> v) & 1 -> promised[v] = when; voted[v] = me
					:: else
					fi
				}
				/* the answers of one voter may be lost: then it is as if ... */
				select(heard : 1 .. ALL);
				heard = (heard & votes) | (1 << me);
#ifndef OWN_GROUP
				for (v : 0 .. N - 1) {
					if
					:: ((heard >> v) & 1) && !((fresh >> v) & 1) ->
						depth(last[v], other); depth(head, k);
						if
						:: written[v] > one || (written[v] == one && other > k) ->
							head = last[v]; base = formed[v]; one = written[v]
						:: written[v] == one && other == k ->
							depth(formed[v], other); depth(base, k);
							if :: other > k -> base = formed[v] :: else fi
						:: else
						fi
					:: else
					fi
				}
#endif
				enough_of_all(head, base, heard, me, yes);
				if
				:: yes -> leads[me] = true; asks[me] = false; acks[me] = 0; runs[me] = NOBODY;
					last[me] = head; formed[me] = base; written[me] = when
				:: else
				fi
			:: else
			fi
		:: else
		fi;
		k = 0; g = 0; whole = 0; half = 0; same = 0; votes = 0; heard = 0; v = 0; head = 0; base = 0; when = 0;
		one = 0; other = 0; yes = false
	   }
	/* It coordinates, and proposes a group; its workers have stopped */
	:: atomic {
		leads[me] && !asks[me] && groups < GROUPS ->
		select(votes : 1 .. ALL);
		members[groups] = votes; disks[groups] = disk; author[groups] = me; before[groups] = last[me];
		last[me] = groups; groups++;
		asks[me] = true; acks[me] = 1 << me; runs[me] = NOBODY;
		votes = 0
	   }
	/* A node follows it, and writes down what it has */
	:: atomic {
		leads[me] ->
		select(v : 0 .. N - 1);
		if
#ifdef NO_PROMISE
		:: v != me && !leads[v] ->
#else
		:: v != me && promised[v] <= promised[me] && (promised[v] < promised[me] || voted[v] == me) ->
#endif
			if :: promised[v] < promised[me] -> voted[v] = me; promised[v] = promised[me] :: else fi;
			leads[v] = false; asks[v] = false; acks[v] = 0; runs[v] = NOBODY;
			if
#ifdef TORN_JOURNAL
			:: last[v] = 0; formed[v] = 0; written[v] = 1
#endif
			:: last[v] = last[me]; formed[v] = formed[me]; written[v] = written[me];
				if :: asks[me] -> acks[me] = acks[me] | (1 << v) :: else fi
			fi;
			fresh = fresh & (ALL ^ (1 << v))
		:: else
		fi;
		v = 0
	   }
	/* Enough nodes have written it down: it starts */
	:: atomic {
		leads[me] && asks[me] ->
#ifdef EARLY_GO
		yes = true;
#else
		enough_of_all(before[last[me]], formed[me], acks[me], me, yes);
#endif
		if
		:: yes -> formed[me] = last[me]; asks[me] = false; acks[me] = 0; runs[me] = last[me]
		:: else
		fi;
		k = 0; g = 0; whole = 0; half = 0; same = 0; yes = false
	   }
	/* It dies, and comes back */
	:: atomic { leads[me] -> leads[me] = false; asks[me] = false; acks[me] = 0; runs[me] = NOBODY }
	:: atomic {
		losses < LOSSES ->
		losses++;
		leads[me] = false; asks[me] = false; acks[me] = 0; runs[me] = NOBODY;
		promised[me] = 0; voted[me] = NOBODY; last[me] = 0; formed[me] = 0; written[me] = 0;
		disk = disk ^ (1 << me); fresh = fresh | (1 << me)
	   }
	od
}

/* Two coordinators hold a group each: so many nodes could still answer either */
inline holds(l, result) {
	result = false;
	if
	:: leads[l] && runs[l] != NOBODY ->
		mask = 0;
		for (n : 0 .. N - 1) { if :: promised[n] <= promised[l] && (n == l || !leads[n]) -> mask = mask | (1 << n) :: else fi }
		enough(runs[l], mask, l, result)
	:: else
	fi
}

proctype watch() {
	byte k, n, mask, whole, half, same, l, number;
	bool yes;
	do
	:: atomic {
		number = 0;
		for (l : 0 .. N - 1) { holds(l, yes); if :: yes -> number++ :: else fi }
		assert(number <= 1);
		k = 0; n = 0; mask = 0; whole = 0; half = 0; same = 0; l = 0; number = 0; yes = false
	   }
	od
}

init {
	byte k;
	atomic {
		members[0] = ALL; author[0] = 0;
		for (k : 0 .. N - 1) { promised[k] = 1; voted[k] = 0; written[k] = 1; runs[k] = NOBODY }
		leads[0] = true; runs[0] = 0;
		k = 0;
		run node(0); run node(1); run node(2); run watch()
	}
}
